"""`sameseed completion`: a script that makes a shell complete commands, flags and files."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from sameseed.cli import COMMANDS
from sameseed.cli.options import parse

# The script takes flags from a command's own help, once per shell, so it also knows the flags of new drafters.
SCRIPT = """[ -n "${ZSH_VERSION-}" ] && autoload -U +X compinit bashcompinit && compinit && bashcompinit
typeset -A _sameseed_flags
_sameseed() {
  local word="${COMP_WORDS[COMP_CWORD]}" name="${COMP_WORDS[1]}" second="${COMP_WORDS[2]-}" seconds=""
  COMPREPLY=()
  case "$name" in bench) seconds="serve" ;; train) seconds="head draft" ;; esac
  [[ -n "$second" && " $seconds " == *" $second "* ]] || second=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "%s" -- "$word"))
  elif [[ "$word" == -* ]]; then
    [ -n "${_sameseed_flags[$name$second]-}" ] ||
      _sameseed_flags[$name$second]="$(sameseed "$name" ${second:+"$second"} --help 2>/dev/null |
        grep -oE -e '--[a-z][a-z-]+' | sort -u)"
    COMPREPLY=($(compgen -W "${_sameseed_flags[$name$second]}" -- "$word"))
  elif [ "$COMP_CWORD" -eq 2 ]; then
    COMPREPLY=($(compgen -W "$seconds" -- "$word"))
  fi
}
complete -o default -F _sameseed sameseed"""


@dataclass(frozen=True)
class CompletionArgs:
    """Print a script that makes bash or zsh complete commands, flags and files: put `source <(sameseed completion)`
    into ~/.bashrc or ~/.zshrc.
    """


def run(argv: Seq[str], prog: str) -> int:
    """Print the script."""
    parse(CompletionArgs, argv, prog)
    print(SCRIPT % " ".join(COMMANDS))
    return 0
