// The versions of what runtimetest is built from: runtime-tools itself has no go.mod. Update: go get PATH@VERSION, go mod tidy.
module nacre.test/runtimetest

go 1.24.0

tool github.com/opencontainers/runtime-tools/cmd/runtimetest

require (
	github.com/cpuguy83/go-md2man/v2 v2.0.0-20190314233015-f79a8a8ca69d // indirect
	github.com/hashicorp/errwrap v1.0.0 // indirect
	github.com/hashicorp/go-multierror v1.1.1 // indirect
	github.com/mndrix/tap-go v0.0.0-20171203230836-629fa407e90b // indirect
	github.com/opencontainers/runtime-spec v1.0.2 // indirect
	github.com/opencontainers/runtime-tools v0.9.0 // indirect
	github.com/opencontainers/selinux v1.6.0 // indirect
	github.com/pkg/errors v0.9.1 // indirect
	github.com/russross/blackfriday/v2 v2.0.1 // indirect
	github.com/shurcooL/sanitized_anchor_name v1.0.0 // indirect
	github.com/sirupsen/logrus v1.8.1 // indirect
	github.com/syndtr/gocapability v0.0.0-20200815063812-42c35b437635 // indirect
	github.com/urfave/cli v1.22.5 // indirect
	github.com/willf/bitset v1.1.11-0.20200630133818-d5bec3311243 // indirect
	golang.org/x/sys v0.0.0-20191115151921-52ab43148777 // indirect
	gopkg.in/yaml.v2 v2.2.2 // indirect
)
