# bytescale completion for fish. To load it in every shell, run this once:
#   bytescale completion fish > ~/.config/fish/completions/bytescale.fish
function __bytescale_complete
    set -l words (commandline -opc)
    $words[1] candidates -- $words[2..-1] (commandline -ct) 2>/dev/null
end
complete -c bytescale -f -a '(__bytescale_complete)'
