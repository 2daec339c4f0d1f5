#!/bin/sh
# The header's plain comments as documentation comments; Markdown passes as it is.
case "$1" in
*.h) sed -e 's#^\(\s*\)// SPDX.*##' -e 's#\([;,{]\)\s*// #\1 ///< #' -e 's#^\(\s*\)// #\1/// #' -e 's#^\(\s*\)//$#\1///#' "$1" ;;
*) cat "$1" ;;
esac
