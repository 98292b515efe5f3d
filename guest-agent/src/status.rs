//! The one map from the agent's errors to ttrpc status codes. Texts are the errors' own.
//!
//! The shim and containerd act on codes: NOT_FOUND makes a kill or a stop a success, FAILED_PRECONDITION and
//! ALREADY_EXISTS are the caller's mistakes, UNIMPLEMENTED is what we do not offer. An error without a code would
//! become UNKNOWN, which makes the kubelet try for ever.

use ttrpc::{Code, get_status};

use crate::{container::Error, init::Kind, process, spec};

impl From<Error> for ttrpc::Error {
    fn from(error: Error) -> Self {
        ttrpc::Error::RpcStatus(get_status(code(&error), error))
    }
}

fn code(error: &Error) -> Code {
    match error {
        Error::Id(_) | Error::Signal(_) | Error::Limit { .. } => Code::INVALID_ARGUMENT,
        Error::Spec(spec::Error::Terminal | spec::Error::Namespace(_)) => Code::UNIMPLEMENTED,
        Error::Spec(_) => Code::INVALID_ARGUMENT,
        Error::Exists(_) => Code::ALREADY_EXISTS,
        Error::NotFound(_) | Error::Finished => Code::NOT_FOUND,
        Error::Started(_) => Code::FAILED_PRECONDITION,
        Error::Stdio(_) => Code::UNAVAILABLE,
        Error::Create(process::Error::Init(failure)) | Error::Start(process::Error::Init(failure)) => {
            match failure.kind {
                Kind::NotFound => Code::NOT_FOUND,
                Kind::Denied => Code::PERMISSION_DENIED,
                Kind::Other => Code::INTERNAL,
            }
        }
        Error::Create(_)
        | Error::Start(_)
        | Error::Cgroup { .. }
        | Error::Kill { .. }
        | Error::Freeze { .. }
        | Error::Sync { .. } => Code::INTERNAL,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::init::Failure;

    fn status(error: Error) -> (Code, String) {
        match ttrpc::Error::from(error) {
            ttrpc::Error::RpcStatus(status) => (status.code(), status.message().to_owned()),
            other => panic!("{other}"),
        }
    }

    #[test]
    fn a_missing_entry_point_is_not_found_with_the_text_that_docker_knows() {
        let text = r#"exec: "x": executable file not found in $PATH"#.to_owned();
        let failure = Failure { kind: Kind::NotFound, text };
        let (code, text) = status(Error::Create(process::Error::Init(failure)));
        assert_eq!(code, Code::NOT_FOUND);
        assert_eq!(
            text,
            r#"OCI runtime create failed: unable to start container process: exec: "x": executable file not found in $PATH"#
        );
    }

    #[test]
    fn signals_to_what_is_gone_are_not_found() {
        assert_eq!(status(Error::Finished), (Code::NOT_FOUND, "process already finished".into()));
        assert_eq!(status(Error::NotFound("a".into())).0, Code::NOT_FOUND);
    }

    #[test]
    fn what_we_do_not_offer_is_unimplemented_and_what_makes_no_sense_is_invalid() {
        assert_eq!(status(Error::Spec(spec::Error::Terminal)).0, Code::UNIMPLEMENTED);
        assert_eq!(status(Error::Spec(spec::Error::Missing("process"))).0, Code::INVALID_ARGUMENT);
        assert_eq!(status(Error::Signal(99)).0, Code::INVALID_ARGUMENT);
    }
}
