#!/usr/bin/env bash
# Builds the xNVMe library into .xnvme/ of this repository: .xnvme/lib/libxnvme.so, about 0.2 MB, with io_uring alone.
#
#   make xnvme                                       fetches the source release and checks it
#   make xnvme XNVME_SOURCE=/path/to/xnvme-0.7.5.tar.gz    or a folder that has it unpacked
#   make xnvme XNVME_SPDK=enabled                    with SPDK, which the build fetches by git (gigabytes, long)
#
# Needs a C compiler, pkg-config, liburing 2.2 or newer with its headers, and Python for meson.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=0.7.5
url=https://github.com/xnvme/xnvme/releases/download/v$version/xnvme-$version.tar.gz
sha256=d951a3115f686956f5c6b839b390ffb50bb443f7711fe35f57a07f4d0667277f
source=${XNVME_SOURCE:-}
spdk=${XNVME_SPDK:-disabled}
python=${PYTHON:-python3}
prefix=$PWD/.xnvme

stop() {
    echo "make xnvme: $*" >&2
    exit 1
}

command -v cc >/dev/null || stop "there is no C compiler (cc). Debian and Ubuntu: apt-get install gcc"
command -v pkg-config >/dev/null || stop "there is no pkg-config. Debian and Ubuntu: apt-get install pkg-config"
pkg-config --atleast-version=2.2 liburing ||
    stop "liburing 2.2 or newer is needed with its headers. Debian and Ubuntu: apt-get install liburing-dev"

mkdir -p "$prefix"
work=$(mktemp -d "$prefix/build.XXXXXX")
trap 'rm -rf "$work"' EXIT

if [ -d "$source" ]; then
    mkdir "$work/source"
    cp -R "$source/." "$work/source"
else
    if [ -z "$source" ]; then
        source=$work/xnvme-$version.tar.gz
        curl --fail --silent --show-error --location --retry 2 --output "$source" "$url" ||
            stop "$url cannot be fetched. Bring it here another way: make xnvme XNVME_SOURCE=/path/to/it"
    fi
    [ -f "$source" ] || stop "XNVME_SOURCE=$source is neither a file nor a folder"
    echo "$sha256  $source" | sha256sum --check --status ||
        stop "$source is not xNVMe $version as released: its SHA-256 is $(sha256sum "$source" | cut -d' ' -f1), not $sha256"
    mkdir "$work/source"
    tar --extract --gzip --file "$source" --directory "$work/source" --strip-components 1
fi
grep -q "version: '$version'" "$work/source/meson.build" || stop "$source is not the source of xNVMe $version"

meson=(meson)
if ! command -v meson >/dev/null || ! command -v ninja >/dev/null; then
    [ -x "$prefix/tools/bin/ninja" ] || {
        "$python" -m venv --clear "$prefix/tools"
        "$prefix/tools/bin/python" -m pip --disable-pip-version-check install --quiet meson==1.9.1 ninja==1.13.0
    }
    export PATH=$prefix/tools/bin:$PATH
fi

"${meson[@]}" setup "$work/build" "$work/source" --prefix "$prefix" --libdir lib --buildtype release \
    --default-library shared --wrap-mode "$([ "$spdk" = enabled ] && echo default || echo nodownload)" \
    -Dwith-liburing=enabled -Dwith-spdk="$spdk" -Dwith-libaio=disabled -Dwith-libvfn=disabled -Dwith-isal=disabled \
    -Dtests=false -Dtools=false -Dexamples=false >"$prefix/build.log" 2>&1 &&
    ninja -C "$work/build" install >>"$prefix/build.log" 2>&1 || {
    tail -n 20 "$prefix/build.log" >&2
    stop "the build failed; the whole log is .xnvme/build.log"
}
[ "$spdk" = enabled ] || rm -rf "$prefix/bin" "$prefix/share" # with SPDK, bin/xnvme-driver sets devices up for it
echo "xNVMe $version is in .xnvme/lib/libxnvme.so (SPDK $spdk)"
