#!/usr/bin/env bash
# Makes build/gpu-bundle, the wheels that a GPU machine lacks, and prints the command to run there.
#
#   scripts/gpu_bundle.sh [OPTION OF benchmarks/gpu.py]...
#
# The GPU machine has x86-64, Python 3.12 and what scripts/gpu_machine.txt lists, and needs no network. It gets a copy of
# the tree with build/gpu-bundle. The command is run in the copy's root, and OUT names a folder for the results. It makes
# an environment of the wheels, in which the machine's own packages are found after them, also by child processes.
#
# GPU_BUNDLE_PACKAGES names the packages beside autoaccum, GPU_BUNDLE_MOST_MIB the most that all wheels may have.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bundle=build/gpu-bundle
most_mib="${GPU_BUNDLE_MOST_MIB:-20}"
packages="${GPU_BUNDLE_PACKAGES-torchao}"

# Asked by running it: a version manager can have a `uv` on the PATH that does not start.
if uv --version >/dev/null 2>&1; then
    pip=(uv tool run --quiet --python '>=3.11' pip --quiet)
else
    pip=(python3 -m pip --quiet)
fi

rm -rf "$bundle"
"${pip[@]}" wheel --no-deps --wheel-dir "$bundle" . >&2
if [ -n "$packages" ]; then
    # shellcheck disable=SC2086 # a list
    "${pip[@]}" download --dest "$bundle" --no-deps --constraint constraints.txt --only-binary :all: \
        --implementation cp --python-version 3.12 --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
        $packages >&2
fi
if commit="$(git describe --always --dirty 2>/dev/null)"; then
    echo "$commit" >"$bundle/commit"  # for the results
fi
bytes="$(cat "$bundle"/*.whl | wc -c)"
if ((bytes > most_mib << 20)); then
    echo "gpu_bundle: the wheels in $bundle have $((bytes >> 10)) KiB, and $most_mib MiB are allowed" >&2
    exit 1
fi

paste -sd ' ' <<END
v="\$(mktemp -d)" && python3 -m venv --without-pip "\$v" && python3 -c 'import pathlib, site, sys, zipfile;
into = pathlib.Path(sys.argv[1]);
[zipfile.ZipFile(wheel).extractall(into) for wheel in pathlib.Path("$bundle").glob("*.whl")];
own = [f"import site; site.addsitedir({folder!r})\n" for folder in site.getsitepackages()];
(into / "machine.pth").write_text("".join(own))' "\$v"/lib/python3*/site-packages &&
"\$v/bin/python" benchmarks/gpu.py --out "\${OUT:?}" --budget 440${*:+$(printf ' %q' "$@")}
END
