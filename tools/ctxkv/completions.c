// SPDX-License-Identifier: Apache-2.0
// Prints the completions of bash, zsh or fish from the commands' own argp tables.
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

// What completes an option's value, told by the name its table gives the value.
typedef enum value_kind {
    VALUE_NONE,
    VALUE_OTHER,
    VALUE_FILE,
    VALUE_FOLDER,
    VALUE_CHOICE
} value_kind;

static value_kind kind_of(const char *name) {
    if (!name) return VALUE_NONE;
    if (strchr(name, '|')) return VALUE_CHOICE;
    if (!strcmp(name, "DIR")) return VALUE_FOLDER;
    return strstr(name, "FILE") || strstr(name, ".json") ? VALUE_FILE : VALUE_OTHER;
}

// "auto|cpu|cuda:N" as words with blanks between; the first GPU stands for all.
static void put_choices(FILE *to, const char *name, bool escape_colon) {
    for (; *name; ++name) {
        if (*name == ':' && escape_colon) fputc('\\', to);
        bool number = *name == 'N' && name[-1] == ':';
        fputc(number ? '0' : *name == '|' ? ' ' : *name, to);
    }
}

// Text inside single quotes. special: characters that take a backslash.
static void put_quoted(FILE *to, const char *text, const char *special) {
    for (; *text; ++text) {
        if (*text == '\'') {
            fputs("'\\''", to);
            continue;
        }
        if (strchr(special, *text)) fputc('\\', to);
        fputc(*text == '\n' ? ' ' : *text, to);
    }
}

static char short_name(const struct argp_option *option) {
    return option->key > 0 && option->key < 128 && isprint(option->key) ? (char)option->key : 0;
}

typedef void (*put_option)(FILE *to, const cli_command *command, const struct argp_option *option);

static void each(FILE *to, const cli_command *command, const struct argp *argp, put_option put) {
    for (const struct argp_option *o = argp->options; o && o->name; ++o) put(to, command, o);
    for (const struct argp_child *c = argp->children; c && c->argp; ++c) {
        each(to, command, c->argp, put);
    }
}

// ---- bash --------------------------------------------------------------------------------------
static void bash_word(FILE *to, const cli_command *command, const struct argp_option *option) {
    (void)command;
    fprintf(to, " --%s%s", option->name, option->arg ? "=" : "");
    if (short_name(option)) fprintf(to, " -%c", short_name(option));
}

static void bash_pattern(FILE *to, const cli_command *command, const struct argp_option *option) {
    fprintf(to, "    %s:--%s", command->name, option->name);
    if (short_name(option)) fprintf(to, "|%s:-%c", command->name, short_name(option));
}

static void bash_value(FILE *to, const cli_command *command, const struct argp_option *option) {
    value_kind kind = kind_of(option->arg);
    if (kind == VALUE_NONE) return;
    bash_pattern(to, command, option);
    fputs(") ", to);
    if (kind == VALUE_CHOICE) {
        fputs("_ctxkv_words \"", to);
        put_choices(to, option->arg, false);
        fputs("\"; ", to);
    } else if (kind != VALUE_OTHER) {
        fprintf(to, "_ctxkv_paths -%c; ", kind == VALUE_FOLDER ? 'd' : 'f');
    }
    fputs("return ;;\n", to);
}

// Bash takes '=' and ':' as words of their own, so a value may stand two words behind its option.
static const char bash_head[] =
    "_ctxkv_words() {\n"
    "    mapfile -t COMPREPLY < <(compgen -W \"$1\" -- \"$cur\")\n"
    "    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace 2>/dev/null\n"
    "    return 0\n"
    "}\n"
    "_ctxkv_paths() {\n"
    "    compopt -o filenames 2>/dev/null\n"
    "    mapfile -t COMPREPLY < <(compgen \"$1\" -- \"$cur\")\n"
    "}\n"
    "_ctxkv() {\n"
    "    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} "
    "command=${COMP_WORDS[1]}\n"
    "    COMPREPLY=()\n";

static void put_bash(FILE *to) {
    fputs("# bash completion of ctxkv, made from its option tables\n", to);
    fputs(bash_head, to);
    fputs("    if [[ $COMP_CWORD -eq 1 ]]; then\n        _ctxkv_words \"", to);
    for (const cli_command *const *c = cli_commands; *c; ++c) fprintf(to, "%s ", (*c)->name);
    fputs("help --help --version\"\n        return\n    fi\n", to);
    fputs("    if [[ $cur == = ]]; then\n        cur=\n", to);
    fputs(
        "    elif [[ $prev == = ]]; then\n        prev=${COMP_WORDS[COMP_CWORD-2]}\n    fi\n", to);
    fputs("    case $command:$prev in\n", to);
    for (const cli_command *const *c = cli_commands; *c; ++c) each(to, *c, (*c)->argp, bash_value);
    fputs("    esac\n    case $command:$cur in\n", to);
    for (const cli_command *const *c = cli_commands; *c; ++c) {
        fprintf(to, "    %s:-*) _ctxkv_words \"--help --usage", (*c)->name);
        each(to, *c, (*c)->argp, bash_word);
        fputs("\" ;;\n", to);
        value_kind kind = kind_of((*c)->argp->args_doc);
        if (kind == VALUE_NONE) continue;
        fprintf(
            to, "    %s:*) _ctxkv_paths -%c ;;\n", (*c)->name, kind == VALUE_FOLDER ? 'd' : 'f');
    }
    fputs("    esac\n}\ncomplete -F _ctxkv ctxkv\n", to);
}

// ---- zsh ---------------------------------------------------------------------------------------
static void zsh_option(FILE *to, const cli_command *command, const struct argp_option *option) {
    (void)command;
    char key = short_name(option);
    value_kind kind = kind_of(option->arg);
    fputs(" \\\n            ", to);
    if (key)
        fprintf(
            to, "'(-%c --%s)'{-%c%s,--%s%s}'", key, option->name, key, kind ? "+" : "",
            option->name, kind ? "=" : "");
    else
        fprintf(to, "'--%s%s", option->name, kind ? "=" : "");
    fputc('[', to);
    put_quoted(to, option->doc, "[]:\\");
    fputc(']', to);
    if (kind) {
        fputc(':', to);
        put_quoted(to, option->arg, ":\\");
        fputc(':', to);
    }
    if (kind == VALUE_FILE) fputs("_files", to);
    if (kind == VALUE_FOLDER) fputs("_files -/", to);
    if (kind == VALUE_CHOICE) {
        fputc('(', to);
        put_choices(to, option->arg, true);
        fputc(')', to);
    }
    fputc('\'', to);
}

static void put_zsh(FILE *to) {
    fputs("#compdef ctxkv\n# made from ctxkv's option tables\n", to);
    fputs("_ctxkv() {\n    local -a commands\n    local command\n    commands=(\n", to);
    for (const cli_command *const *c = cli_commands; *c; ++c) {
        fprintf(to, "        '%s:", (*c)->name);
        put_quoted(to, (*c)->summary, ":\\");
        fputs("'\n", to);
    }
    fputs("    )\n    if (( CURRENT == 2 )); then\n        _describe command commands\n", to);
    fputs("        return\n    fi\n    command=$words[2]\n    shift words\n", to);
    fputs("    (( CURRENT-- ))\n    case $command in\n", to);
    for (const cli_command *const *c = cli_commands; *c; ++c) {
        fprintf(
            to, "    %s)\n        _arguments '(- *)--help[Tell about the command]'", (*c)->name);
        each(to, *c, (*c)->argp, zsh_option);
        value_kind kind = kind_of((*c)->argp->args_doc);
        if (kind) {
            fprintf(
                to, " \\\n            '*:%s:_files%s'", kind == VALUE_FOLDER ? "folder" : "file",
                kind == VALUE_FOLDER ? " -/" : "");
        }
        fputs("\n        ;;\n", to);
    }
    fputs("    esac\n}\n_ctxkv \"$@\"\n", to);
}

// ---- fish --------------------------------------------------------------------------------------
// Within fish's single quotes only two characters are special.
static void fish_text(FILE *to, const char *text) {
    fputs(" -d '", to);
    for (; *text; ++text) {
        if (*text == '\'' || *text == '\\') fputc('\\', to);
        fputc(*text == '\n' ? ' ' : *text, to);
    }
    fputs("'\n", to);
}

static void fish_option(FILE *to, const cli_command *command, const struct argp_option *option) {
    value_kind kind = kind_of(option->arg);
    fprintf(
        to, "complete -c ctxkv -n '__fish_seen_subcommand_from %s' -l %s", command->name,
        option->name);
    if (short_name(option)) fprintf(to, " -s %c", short_name(option));
    if (kind == VALUE_FILE) fputs(" -r -F", to);
    if (kind == VALUE_OTHER) fputs(" -x", to);
    if (kind == VALUE_FOLDER) fputs(" -x -a '(__fish_complete_directories)'", to);
    if (kind == VALUE_CHOICE) {
        fputs(" -x -a '", to);
        put_choices(to, option->arg, false);
        fputc('\'', to);
    }
    fish_text(to, option->doc);
}

static void put_fish(FILE *to) {
    fputs("# fish completion of ctxkv, made from its option tables\ncomplete -c ctxkv -f\n", to);
    for (const cli_command *const *c = cli_commands; *c; ++c) {
        fprintf(to, "complete -c ctxkv -n __fish_use_subcommand -a %s", (*c)->name);
        fish_text(to, (*c)->summary);
        value_kind kind = kind_of((*c)->argp->args_doc);
        if (kind) {
            fprintf(
                to, "complete -c ctxkv -n '__fish_seen_subcommand_from %s' %s\n", (*c)->name,
                kind == VALUE_FOLDER ? "-a '(__fish_complete_directories)'" : "-F");
        }
        fprintf(
            to,
            "complete -c ctxkv -n '__fish_seen_subcommand_from %s' -l help -d 'Tell about "
            "the command'\n",
            (*c)->name);
        each(to, *c, (*c)->argp, fish_option);
    }
}

int main(int argc, char **argv) {
    FILE *to = argc == 3 ? fopen(argv[2], "w") : NULL;
    if (!to) return 2;
    if (!strcmp(argv[1], "bash")) put_bash(to);
    if (!strcmp(argv[1], "zsh")) put_zsh(to);
    if (!strcmp(argv[1], "fish")) put_fish(to);
    bool ok = !ferror(to) && ftell(to) > 0;
    return !fclose(to) && ok ? 0 : 2;
}
