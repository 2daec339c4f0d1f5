# SPDX-License-Identifier: Apache-2.0
# The two commands of the README: make demo, make check. The build itself is CMake's.
.PHONY: all demo check lint clean
all: build/release/build.ninja
	cmake --build build/release

build/release/build.ninja: CMakeLists.txt
	scripts/deps build
	cmake -S . -B build/release -G Ninja -DCTXKV_BUILD_TESTS=OFF

demo: all
	scripts/demo build/release

check:
	scripts/check

lint:
	scripts/lint

clean:
	rm -rf build
