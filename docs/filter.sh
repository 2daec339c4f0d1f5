#!/bin/sh
# The header's plain comments as documentation comments. In Markdown, links as the site has them: all
# pictures beside the pages, the header's page, and of other sources the name alone.
# shellcheck disable=SC2016  # backticks are Markdown here
case "$1" in
*.h) sed -e 's#^\(\s*\)// SPDX.*##' -e 's#\([;,{]\)\s*// #\1 ///< #' -e 's#^\(\s*\)// #\1/// #' -e 's#^\(\s*\)//$#\1///#' "$1" ;;
*)
    sed -e 's#](\(\.\./\)*\(docs/\)\{0,1\}images/#](#g' \
        -e 's#\[\([^]]*\)\]([^)]*include/ctxkv/ctxkv\.h)#@ref ctxkv.h "\1"#g' \
        -e 's#\[\([^]]*\)\]([^):]*\.\(c\|h\|cpp\|py\))#`\1`#g' "$1"
    ;;
esac
