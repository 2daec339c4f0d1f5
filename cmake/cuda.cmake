# SPDX-License-Identifier: Apache-2.0
# The CUDA part of the library; a build without nvcc says so at run time.
target_sources(ctxkv_core PRIVATE ${PROJECT_SOURCE_DIR}/src/chain/cuda_none.c)
message(STATUS "ctxkv: no CUDA code in this build")
