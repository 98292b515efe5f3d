//! `nacre config show`: which settings are in force, and who said so.

use std::{env, path::PathBuf};

use config::{Asked, ConfigError, Effective, FILE_VARIABLE};

use crate::{Answer, cli::ShowArgs, ps};

/// Shows them, or the error that a pod would get.
pub fn show(asked: &ShowArgs) -> Result<Answer, String> {
    let effective = find(asked)?.map_err(|error| error.to_string())?;
    let text =
        if asked.json { format!("{:#}\n", effective.to_json()) } else { format!("{}\n{effective}", heading(asked)) };
    Ok(Answer { text, good: true })
}

fn find(asked: &ShowArgs) -> Result<Result<Effective, ConfigError>, String> {
    if let Some(file) = &asked.file {
        return Ok(config::read(file));
    }
    let asked = match &asked.pod {
        None => Asked::default(),
        Some(pod) => Asked::in_bundle(&bundle(pod, asked)?).map_err(|error| error.to_string())?,
    };
    Ok(config::load(&asked))
}

fn bundle(pod: &str, asked: &ShowArgs) -> Result<PathBuf, String> {
    let namespace = &asked.namespace;
    let found = ps::bundles(&asked.state).into_iter().find(|bundle| bundle.namespace == *namespace && bundle.id == pod);
    found
        .map(|bundle| bundle.directory)
        .ok_or_else(|| format!("there is no pod {pod} in namespace {namespace}; `nacre ps` lists pods"))
}

/// A comment, so that all that is printed is TOML.
fn heading(asked: &ShowArgs) -> String {
    match (&asked.pod, &asked.file, env::var_os(FILE_VARIABLE)) {
        (Some(pod), ..) => format!("# For the pod {pod}, if it were started now."),
        (None, Some(file), _) => format!("# As {} says.", file.display()),
        (None, None, Some(file)) => format!("# {FILE_VARIABLE}={}", file.display()),
        (None, None, None) => "# For a pod that asks for nothing.".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn asked(file: PathBuf, json: bool) -> ShowArgs {
        ShowArgs { pod: None, namespace: "default".into(), state: Vec::new(), file: Some(file), json }
    }

    #[test]
    fn file_is_shown_with_its_lines_and_an_illegal_one_is_explained() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let file = directory.path().join("c.toml");
        fs::write(&file, "[machine]\nvcpus = 2\n").expect("write");
        let text = show(&asked(file.clone(), false)).expect("legal").text;
        assert!(text.contains(&format!("# {}:2", file.display())) && text.contains("vcpus = 2 "), "{text}");
        let json = show(&asked(file.clone(), true)).expect("legal").text;
        let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
        assert_eq!(json["settings"][5]["source"], "file");
        fs::write(&file, "[machine]\nvcpus = 99\n").expect("write");
        let error = show(&asked(file, false)).err().expect("illegal");
        assert!(error.contains(":2: machine.vcpus = 99"), "{error}");
    }

    #[test]
    fn pod_is_shown_with_what_it_asked_for() {
        let state = tempfile::tempdir().expect("temporary directory");
        let bundle = state.path().join("n1/web");
        fs::create_dir_all(&bundle).expect("create");
        fs::write(bundle.join("address"), "unix:///s").expect("write");
        fs::write(bundle.join("shim.pid"), "1 2").expect("write");
        let body = "[machine]\nmemory_mib = 300\n[annotations]\nallow = [\"dev.nacre.vcpus\"]\n";
        let options = config::Options { config_body: body.into(), ..Default::default() };
        options.write(&bundle).expect("write");
        fs::write(bundle.join("config.json"), r#"{"annotations":{"dev.nacre.vcpus":"3"}}"#).expect("write");
        let pod = |id: &str| ShowArgs {
            pod: Some(id.into()),
            namespace: "n1".into(),
            state: vec![state.path().into()],
            file: None,
            json: false,
        };
        let text = show(&pod("web")).expect("legal").text;
        assert!(text.contains("# annotation dev.nacre.vcpus"), "{text}");
        assert!(text.contains("# runtime options, line 2 of ConfigBody"), "{text}");
        assert!(show(&pod("other")).err().expect("absent").contains("no pod other"));
    }
}
