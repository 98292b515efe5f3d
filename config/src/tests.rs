//! Sentences about files, options and annotations together.

use std::time::Duration;

use super::*;

fn parsed(text: &str) -> Result<Effective, ConfigError> {
    parse(Path::new("/etc/nacre/config.toml"), text)
}

fn complaint(text: &str) -> String {
    parsed(text).expect_err("must be refused").to_string()
}

fn with_body(body: &str) -> Result<Effective, ConfigError> {
    let mut effective = Effective::default();
    let options = Options { config_body: body.into(), ..Options::default() };
    adopt(&mut effective, &Asked { options, ..Asked::default() }).map(|()| effective)
}

fn with_annotations(file: &str, annotations: &[(&str, &str)]) -> Result<Effective, ConfigError> {
    let mut effective = parsed(file)?;
    let annotations = annotations.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
    adopt(&mut effective, &Asked { annotations, ..Asked::default() }).map(|()| effective)
}

fn origin(effective: &Effective, wanted: &str) -> String {
    effective.entries().into_iter().find(|(key, ..)| *key == wanted).expect("a key").2.to_string()
}

#[test]
fn empty_file_means_the_defaults() {
    let effective = parsed("").expect("legal");
    assert_eq!(effective, Effective::default());
    let spec = effective.spec;
    assert_eq!((spec.machine.vcpus, spec.machine.memory_mib), (1, 256));
    assert_eq!(spec.shim.boot_timeout, Duration::from_secs(30));
    assert!(spec.allowed_annotations.is_empty(), "a pod may change nothing unless the operator says so");
}

#[test]
fn sample_shows_every_key_with_its_default() {
    let sample = include_str!("../default.toml");
    let uncommented: String =
        sample.lines().map(|line| line.strip_prefix("#:").unwrap_or(line)).map(|line| format!("{line}\n")).collect();
    assert_eq!(parsed(sample).expect("sample is legal"), Effective::default());
    let all = parsed(&uncommented).expect("sample with every key set is legal");
    for ((key, value, origin), (_, default, _)) in all.entries().into_iter().zip(Effective::default().entries()) {
        assert!(matches!(origin, Origin::File { .. }), "{key} is missing in the sample");
        assert_eq!(value, default, "{key}");
    }
}

#[test]
fn unknown_key_is_named_with_its_line() {
    let text = complaint("[machine]\nvcpus = 2\nmemory = 512\n");
    assert!(text.starts_with("/etc/nacre/config.toml:3: unknown field `memory`"), "{text}");
}

#[test]
fn wrong_type_shows_the_line_as_written() {
    let text = complaint("[machine]\nvcpus = \"two\"\n");
    assert!(text.contains("config.toml:2: ") && text.contains("`vcpus = \"two\"`"), "{text}");
}

#[test]
fn value_out_of_range_names_key_range_and_unit() {
    let text = complaint("\n[machine]\nvcpus = 33\n");
    assert_eq!(text, "/etc/nacre/config.toml:3: machine.vcpus = 33 is not legal; it must be 1 to 32 virtual CPUs");
    for (section, line, range) in [
        ("machine", "memory_mib = 63", "64 to 65536 MiB"),
        ("shim", "boot_timeout_s = 0", "1 to 600 seconds"),
        ("shim", "log_level = \"loud\"", "error, warn, info, debug or trace"),
        ("shim", "log_dir = \"logs\"", "an absolute path, or empty"),
        ("shim", "log_max_kib = 15", "16 to 65536 KiB"),
        ("shim", "log_keep = -1", "0 to 10000 files"),
        ("paths", "vmm = \"nacre-vmm\"", "an absolute path"),
        ("annotations", "allow = [\"dev.nacre.paths\"]", "dev.nacre.vcpus, "),
    ] {
        let text = complaint(&format!("[{section}]\n{line}\n"));
        let key = line.split(' ').next().expect("a key");
        assert!(text.contains(&format!(":2: {section}.{key} = ")) && text.contains(range), "{text}");
    }
}

#[test]
fn file_asked_for_by_name_must_exist() {
    let text = read(Path::new("/nonexistent/nacre.toml")).expect_err("absent").to_string();
    assert!(text.contains("/nonexistent/nacre.toml"), "{text}");
    let options = Options { config_path: "/nonexistent/options.toml".into(), ..Options::default() };
    let text = load(&Asked { options, ..Asked::default() }).expect_err("absent").to_string();
    assert!(text.contains("/nonexistent/options.toml"), "{text}");
}

#[test]
fn options_win_over_the_file_and_annotations_over_both() {
    let file = "[machine]\nvcpus = 2\nmemory_mib = 512\n[annotations]\nallow = [\"dev.nacre.memory_mib\"]\n";
    let mut effective = parsed(file).expect("legal");
    let asked = Asked {
        options: Options { config_body: "[machine]\nvcpus = 3\nmemory_mib = 600\n".into(), ..Options::default() },
        annotations: [("dev.nacre.memory_mib".into(), "700".into())].into(),
    };
    adopt(&mut effective, &asked).expect("legal");
    assert_eq!((effective.spec.machine.vcpus, effective.spec.machine.memory_mib), (3, 700));
    assert_eq!(origin(&effective, "machine.vcpus"), "runtime options, line 2 of ConfigBody");
    assert_eq!(origin(&effective, "machine.memory_mib"), "annotation dev.nacre.memory_mib");
    assert_eq!(origin(&effective, "annotations.allow"), "/etc/nacre/config.toml:5");
    assert_eq!(origin(&effective, "paths.vmm"), "default");
}

#[test]
fn options_of_runc_and_containerd_beside_our_sections_do_no_harm() {
    let body =
        "TypeUrl = \"t\"\nConfigPath = \"\"\nSystemdCgroup = true\nBinaryName = \"runc\"\n[machine]\nvcpus = 2\n";
    let effective = with_body(body).expect("legal");
    assert_eq!(effective.spec.machine.vcpus, 2);
    assert_eq!(effective.ignored, ["BinaryName", "SystemdCgroup"]);
}

#[test]
fn mistakes_in_the_options_are_named_with_their_line() {
    for (body, wanted) in [
        ("A = 1\n[machine]\nvcpu = 2\n", "runtime options (ConfigBody):3: unknown field `vcpu`"),
        ("[machin]\nvcpus = 2\n", "runtime options (ConfigBody):1: unknown field `machin`"),
        ("[machine]\nvcpus = 0\n", "runtime options (ConfigBody):2: machine.vcpus = 0 is not legal"),
        ("no TOML", "runtime options (ConfigBody):1: "),
    ] {
        let text = with_body(body).expect_err("must be refused").to_string();
        assert!(text.starts_with(wanted), "{text}");
    }
}

#[test]
fn annotation_that_is_not_allowed_is_refused_with_the_key_that_would_allow_it() {
    let other = "[annotations]\nallow = [\"dev.nacre.vcpus\"]\n";
    for file in ["", other] {
        let text = with_annotations(file, &[("dev.nacre.memory_mib", "512")]).expect_err("not allowed").to_string();
        assert!(text.contains("dev.nacre.memory_mib") && text.contains("annotations.allow"), "{text}");
    }
    let text = with_annotations(other, &[("dev.nacre.cpus", "2")]).expect_err("does not exist").to_string();
    assert!(text.starts_with("annotation dev.nacre.cpus does not exist; there are dev.nacre.vcpus, "), "{text}");
}

#[test]
fn annotation_out_of_range_is_refused_as_in_the_file() {
    let file = "[annotations]\nallow = [\"dev.nacre.vcpus\", \"dev.nacre.log_level\"]\n";
    for (name, value, range) in [
        ("dev.nacre.vcpus", "64", "1 to 32 virtual CPUs"),
        ("dev.nacre.vcpus", "two", "1 to 32 virtual CPUs"),
        ("dev.nacre.vcpus", "", "1 to 32 virtual CPUs"),
        ("dev.nacre.log_level", "loud", "error, warn, info, debug or trace"),
    ] {
        let text = with_annotations(file, &[(name, value)]).expect_err("out of range").to_string();
        assert_eq!(text, format!("annotation {name} = {value:?} is not legal; it must be {range}"));
    }
}

#[test]
fn what_is_shown_is_toml_that_means_the_same() {
    let effective = parsed("[machine]\nkernel_cmdline = \"a=\\\"b c\\\"\"\n[shim]\nlog_dir = \"\"\n").expect("legal");
    let shown = effective.to_string();
    assert!(shown.contains("memory_mib = 256") && shown.contains("# /etc/nacre/config.toml:2"), "{shown}");
    assert_eq!(parsed(&shown).expect("legal").spec, effective.spec);
    let json = effective.to_json();
    let cmdline = &json["settings"][7];
    assert_eq!((&cmdline["key"], &cmdline["source"]), (&"machine.kernel_cmdline".into(), &"file".into()));
    assert_eq!(cmdline["value"], "a=\"b c\"");
}
