# bytescale completion for bash. To load it in every shell, add this line to ~/.bashrc:
#   source <(bytescale completion bash)
_bytescale() {
    local line="${COMP_LINE:0:COMP_POINT}" word="" head="" candidate
    COMPREPLY=()
    # bash splits words at = and :, and replaces only what follows the last of them.
    case "$line" in *[[:space:]]) ;; *) word="${line##*[[:space:]]}" ;; esac
    case "$word" in *[=:]*) [[ "$COMP_WORDBREAKS" == *=* ]] && head="${word%"${word##*[=:]}"}" ;; esac
    while IFS=$'\t' read -r candidate _; do
        [[ "$candidate" == *[=/] ]] && type compopt >/dev/null 2>&1 && compopt -o nospace
        candidate="${candidate#"$head"}"
        printf -v candidate %q "$candidate"
        candidate="${candidate//\\,/,}"
        COMPREPLY+=("${candidate/#\\\~/\~}")
    done < <("${1/#\~/$HOME}" candidates --line "$line" 2>/dev/null)
}
complete -F _bytescale bytescale
