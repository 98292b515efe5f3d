# Nacre's commands for people. `make help` lists them; README.md explains them.
SHELL := /bin/bash
.ONESHELL:
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Everything that can be rebuilt lies outside of the tree.
export NACRE_CACHE ?= $(HOME)/.cache/nacre
export CARGO_TARGET_DIR ?= $(NACRE_CACHE)/target
# Clones share the cache, and cargo does not rebuild a program only because its tree has moved.
export NACRE_TREE := $(CURDIR)
STAGE := $(NACRE_CACHE)/stage
LIB := $(STAGE)/usr/local/lib/nacre
BIN := $(STAGE)/usr/local/bin
LAB := $(CARGO_TARGET_DIR)/release/lab
# What is installed is static and linked at a fixed address: no loader, no relocations in any process of a start.
TARGET := x86_64-unknown-linux-gnu
STATIC := -C target-feature=+crt-static -C relocation-model=static

comma := ,
say = @echo "==> $(1)" >&2

.PHONY: help demo test check unit house vm count bench soak files stress fuzz lab build kernel agent needs lab-ready install clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

needs: ## install the Debian packages that building and the lab need
	@tests/lab/needs

kernel: needs ## build the guest kernel (cached)
	@vmm/guest-kernel/build

agent: needs ## build the guest agent and its initramfs
	$(call say,building the guest agent)
	@guest-agent/initramfs --out $(NACRE_CACHE)/nacre-agent.cpio

build: kernel agent ## build everything and lay it out as it is installed, in the cache
	$(call say,building shim$(comma) VMM and the nacre command)
	@RUSTFLAGS='$(STATIC)' cargo build --release --quiet --target $(TARGET) -p shim -p vmm -p node
	built=$(CARGO_TARGET_DIR)/$(TARGET)/release
	mkdir -p $(BIN) $(LIB)
	install -m 755 $$built/containerd-shim-nacre-v2 $$built/nacre $(BIN)/
	install -m 755 $$built/nacre-holder $$built/nacre-vmm $(LIB)/
	install -m 644 $(NACRE_CACHE)/nacre-agent.cpio $(NACRE_CACHE)/kernel/vmlinux $(LIB)/

lab-ready: needs
	$(call say,building the lab)
	@cargo build --release --quiet -p lab
	$(LAB) build

lab: build lab-ready ## a shell in the lab, with Nacre installed
	@$(LAB) shell --stage $(STAGE)

demo: build ## show the main job: containers in microVMs, on this host if its KVM can, else in the lab
	@tests/demo/run $(LAB) $(STAGE)

test: check unit vm count ## formatting, clippy, house rules, unit tests, VM tests in the lab, counted figures

check: needs
	$(call say,formatting and clippy)
	@cargo fmt --all --check
	cargo fmt --manifest-path tests/fuzz/Cargo.toml --check
	cargo clippy --workspace --all-targets --all-features --quiet -- -D warnings

unit: needs
	$(call say,house rules and unit tests)
	@cargo test --workspace --quiet

vm: build lab-ready
	$(call say,VM tests in the lab)
	@tests/lab/cases $(LAB) $(STAGE)

count: build lab-ready ## count what a start costs, and fail if it has become dearer
	$(call say,counting a start in the lab)
	@tests/perf/count $(LAB) $(STAGE)

bench: build lab-ready ## count what a start costs, beside runc and pvisor
	@tests/perf/bench $(LAB) $(STAGE) $(NACRE_CACHE)/bench

files: needs ## compare virtio-fs with Debian's virtiofsd, in pairs on this host
	@tests/perf/files/run

soak: build lab-ready ## 500 runs in a row and 20 times 20 at once, on each containerd of the lab (hours)
	@tests/lab/soak $(LAB) $(STAGE)

stress: build lab-ready ## fio and stress-ng in a container's root and in a volume
	@tests/stress/run $(LAB) $(STAGE)

SECONDS ?= 60
fuzz: ## run each fuzz target for a while: SECONDS=60 each
	@tests/fuzz/run all $(SECONDS)

install: build ## install on this machine, under /usr/local
	@cp -r $(STAGE)/usr/local/. /usr/local/

clean: ## remove what was built (the downloads and the lab's root stay)
	@rm -rf $(CARGO_TARGET_DIR) $(STAGE) $(NACRE_CACHE)/nacre-agent.cpio
