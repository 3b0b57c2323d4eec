#compdef bytescale
# bytescale completion for zsh. To load it in every shell, add this line to ~/.zshrc, after compinit:
#   source <(bytescale completion zsh)
_bytescale() {
    local line candidate about
    local -a ends ends_about goes goes_about
    while IFS= read -r line; do
        candidate="${line%%$'\t'*}" about="$candidate  ${line#*$'\t'}"
        if [[ "$candidate" == *[=/] ]]; then
            goes+=("$candidate") goes_about+=("$about")
        else
            ends+=("$candidate") ends_about+=("$about")
        fi
    done < <("${(Q)words[1]/#\~/$HOME}" candidates -- "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)
    (( ${#ends} )) && compadd -l -d ends_about -a ends
    (( ${#goes} )) && compadd -l -S '' -d goes_about -a goes
}
if [[ "${funcstack[1]}" == _bytescale ]]; then
    _bytescale "$@"
else
    compdef _bytescale bytescale
fi
