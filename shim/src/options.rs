//! Runtime options on the wire: `runtimeoptions.v1.Options` in an `Any`.
//!
//! They arrive up to three times, by the version of containerd: as the whole of `start`'s stdin, among the extensions of
//! its `BootstrapParams`, and with every Create. The first container's `start` decides, because the machine is built
//! before any Create is heard.
//!
//! Options of other types are not for us: CRI sends runc's to runtimes that it takes for runc's. Fields that do not exist
//! are skipped. Bytes that are no message say nothing; containerd made them, and would have to be told elsewhere.

use config::Options;
use protobuf::{CodedInputStream, rt::skip_field_for_tag, well_known_types::any::Any};

/// How the type is called, whatever prefix stands before it.
const TYPE: &str = "runtimeoptions.v1.Options";

/// The message's fields, each a number with the wire type of strings and bytes.
const TYPE_URL: u32 = 1 << 3 | 2;
const CONFIG_PATH: u32 = 2 << 3 | 2;
const CONFIG_BODY: u32 = 3 << 3 | 2;

/// What `any` asks for, if it is for us.
#[must_use]
pub fn decode(any: &Any) -> Option<Options> {
    if !any.type_url.ends_with(TYPE) {
        return None;
    }
    let mut options = Options::default();
    let mut fields = CodedInputStream::from_bytes(&any.value);
    while let Some(tag) = fields.read_raw_tag_or_eof().ok()? {
        match tag {
            TYPE_URL => options.type_url = fields.read_string().ok()?,
            CONFIG_PATH => options.config_path = fields.read_string().ok()?,
            // TOML is UTF-8: what is not makes an error that shows the replacement.
            CONFIG_BODY => options.config_body = String::from_utf8_lossy(&fields.read_bytes().ok()?).into_owned(),
            other => skip_field_for_tag(other, &mut fields).ok()?,
        }
    }
    Some(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn any(type_url: &str, value: &[u8]) -> Any {
        Any { type_url: type_url.into(), value: value.into(), ..Any::default() }
    }

    #[test]
    fn every_field_is_read_and_unknown_ones_are_skipped() {
        // type_url = "t", config_path = "/c", config_body = "b", field 9 = 1
        let bytes = [0x0a, 1, b't', 0x12, 2, b'/', b'c', 0x1a, 1, b'b', 0x48, 1];
        let options = decode(&any("type.googleapis.com/runtimeoptions.v1.Options", &bytes)).expect("for us");
        assert_eq!(options, Options { type_url: "t".into(), config_path: "/c".into(), config_body: "b".into() });
        assert!(decode(&any(TYPE, &[])).expect("for us").is_empty());
    }

    #[test]
    fn options_of_runc_and_garbage_say_nothing() {
        assert_eq!(decode(&any("containerd.runc.v1.Options", &[0x12, 2, b'/', b'c'])), None);
        assert_eq!(decode(&any(TYPE, &[0xff; 9])), None);
    }
}
