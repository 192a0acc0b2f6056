# Flags come from a command's own help, once per shell, so those of new drafters and commands are known too.
[ -n "${ZSH_VERSION-}" ] && autoload -U +X compinit bashcompinit && compinit && bashcompinit
typeset -A _sameseed_flags
_sameseed() {
  local word="${COMP_WORDS[COMP_CWORD]}" name="${COMP_WORDS[1]}" second="${COMP_WORDS[2]-}" seconds=""
  COMPREPLY=()
  case "$name" in bench) seconds="serve" ;; train) seconds="head draft" ;; esac
  [[ -n "$second" && " $seconds " == *" $second "* ]] || second=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "$_sameseed_commands" -- "$word"))
  elif [[ "$word" == -* ]]; then
    [ -n "${_sameseed_flags[$name$second]-}" ] ||
      _sameseed_flags[$name$second]="$(sameseed "$name" ${second:+"$second"} --help 2>/dev/null |
        grep -oE -e '--[a-z][a-z-]+' | sort -u)"
    COMPREPLY=($(compgen -W "${_sameseed_flags[$name$second]}" -- "$word"))
  elif [ "$COMP_CWORD" -eq 2 ]; then
    COMPREPLY=($(compgen -W "$seconds" -- "$word"))
  fi
}
complete -o default -F _sameseed sameseed
