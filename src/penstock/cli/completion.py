"""``penstock completion``: what makes a shell complete the commands and their options."""

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
    if [ -z "$words" ]; then
        case "$command" in
{options}
        esac
        [[ "$current" == -* ]] || words=""
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _penstock penstock
"""
_ZSH = """#compdef penstock
# penstock completion zsh > "${{fpath[1]}}/_penstock"
autoload -U +X bashcompinit && bashcompinit
{bash}"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="which shell")
    parser.epilog = """examples:
  eval "$(penstock completion bash)"
  penstock completion fish > ~/.config/fish/completions/penstock.fish"""


def run(args: argparse.Namespace) -> int:
    """Print it."""
    bash = _bash()
    sys.stdout.write({"bash": bash, "zsh": _ZSH.format(bash=bash), "fish": _fish()}[args.shell])
    return 0


def _described() -> dict[str, list[argparse.Action]]:
    """Every command and its options, from the parsers that run them."""
    from penstock.cli import COMMANDS, parser_of
    from penstock.cli.tools import TOOLS

    parsers = {name: parser_of(name) for name in sorted(COMMANDS | TOOLS)}
    return {name: [a for a in p._actions if a.help is not argparse.SUPPRESS] for name, p in parsers.items()}


def _bash() -> str:
    options, choices = [], []
    described = _described()
    for name, actions in described.items():
        words = " ".join(word for action in actions for word in action.option_strings)
        options.append(f'        {name}) words="{words}" ;;')
        for action in actions:
            if action.choices and action.option_strings:
                heads = "|".join(f'"{name} {word}"' for word in action.option_strings)
                choices.append(f'        {heads}) words="{" ".join(map(str, action.choices))}" ;;')
    return _BASH.format(commands=" ".join(described), options="\n".join(options), choices="\n".join(choices))


def _fish() -> str:
    from penstock.cli import COMMANDS
    from penstock.cli.tools import TOOLS

    lines = ["# penstock completion fish > ~/.config/fish/completions/penstock.fish"]
    for name, about in sorted((COMMANDS | TOOLS).items()):
        lines.append(f"complete -c penstock -n __fish_use_subcommand -a {name} -d {_quoted(about)}")
    for name, actions in _described().items():
        for action in actions:
            for word in action.option_strings:
                kind = f"-l {word[2:]}" if word.startswith("--") else f"-s {word[1:]}"
                wanted = "" if action.nargs == 0 else " -r"
                some = f" -f -a {_quoted(' '.join(map(str, action.choices)))}" if action.choices else ""
                about = _quoted((action.help or "").replace("%%", "%"))
                lines.append(
                    f"complete -c penstock -n '__fish_seen_subcommand_from {name}' {kind}{wanted}{some} -d {about}"
                )
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
