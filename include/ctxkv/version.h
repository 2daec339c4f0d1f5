// SPDX-License-Identifier: Apache-2.0
// Version of the headers; ctxkv_version() gives that of the library in use.
#ifndef CTXKV_VERSION_H
#define CTXKV_VERSION_H
#define CTXKV_VERSION_MAJOR 0
#define CTXKV_VERSION_MINOR 1
#define CTXKV_VERSION_PATCH 0
#define CTXKV_VERSION_STRING "0.1.0"
#endif
