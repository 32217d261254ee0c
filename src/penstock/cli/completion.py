"""``penstock completion``: print a script that makes a shell complete the commands and their options."""

from __future__ import annotations

import argparse
import sys

_BASH = """# eval "$(penstock completion bash)"
_penstock() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
    local command="${{COMP_WORDS[1]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands} --help --version" -- "$current"))
        return
    fi
    case "$command $previous" in
{choices}
    esac
    if [[ "$current" == -* ]]; then
        case "$command" in
{options}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _penstock penstock
"""
_ZSH = """#compdef penstock
# penstock completion zsh > "${{fpath[1]}}/_penstock"
autoload -U +X bashcompinit && bashcompinit
{bash}# zsh loads the file at the first completion, which this line then answers.
[[ "${{funcstack[1]}}" != _penstock ]] || _bash_complete -o default -F _penstock
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that the script is for")
    parser.epilog = """examples:
  eval "$(penstock completion bash)"
  penstock completion zsh > "${fpath[1]}/_penstock"
  penstock completion fish > ~/.config/fish/completions/penstock.fish"""


def run(args: argparse.Namespace) -> int:
    bash = _bash()
    sys.stdout.write({"bash": bash, "zsh": _ZSH.format(bash=bash), "fish": _fish()}[args.shell])
    return 0


def _actions_by_command() -> dict[str, list[argparse.Action]]:
    """Return the visible arguments of every command, from the parsers that the commands use."""
    from penstock.cli import COMMANDS, parser_of
    from penstock.cli.tools import TOOLS

    parsers = {name: parser_of(name) for name in sorted(COMMANDS | TOOLS)}
    return {
        name: [action for action in parser._actions if action.help is not argparse.SUPPRESS]
        for name, parser in parsers.items()
    }


def _bash() -> str:
    options, choices = [], []
    actions_by_command = _actions_by_command()
    for name, actions in actions_by_command.items():
        flags = " ".join(flag for action in actions for flag in action.option_strings)
        options.append(f'        {name}) words="{flags}" ;;')
        for action in actions:
            if action.choices:
                cases = "|".join(f'"{name} {flag}"' for flag in action.option_strings or [name])
                choices.append(f'        {cases}) words="{" ".join(map(str, action.choices))}" ;;')
    return _BASH.format(commands=" ".join(actions_by_command), options="\n".join(options), choices="\n".join(choices))


def _fish() -> str:
    from penstock.cli import COMMANDS
    from penstock.cli.tools import TOOLS

    lines = ["# penstock completion fish > ~/.config/fish/completions/penstock.fish"]
    for name, summary in sorted((COMMANDS | TOOLS).items()):
        lines.append(f"complete -c penstock -n __fish_use_subcommand -a {name} -d {_quoted(summary)}")
    for name, actions in _actions_by_command().items():
        seen = f"__fish_seen_subcommand_from {name}"
        for action in actions:
            choices = f" -f -a {_quoted(' '.join(map(str, action.choices)))}" if action.choices else ""
            description = _quoted((action.help or "").replace("%%", "%"))
            for flag in action.option_strings:
                option = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
                takes_value = "" if action.nargs == 0 else " -r"
                lines.append(f"complete -c penstock -n '{seen}' {option}{takes_value}{choices} -d {description}")
            if choices and not action.option_strings:  # it is the first argument of its command
                first = f"{seen}; and test (count (commandline -opc)) -eq 2"
                lines.append(f"complete -c penstock -n '{first}'{choices} -d {description}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
