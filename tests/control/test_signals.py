from __future__ import annotations

import signal
import subprocess

from engine.control.signals import STOP_SIGNALS, handled, shielded


def test_a_hang_up_that_nohup_ignores_is_not_handled() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert set(STOP_SIGNALS) - set(handled()) == {signal.SIGHUP}
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert set(handled()) == set(STOP_SIGNALS)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_shielded_command_gets_its_words_and_ignores_all_requests_to_stop() -> None:
    script = 'for name in INT TERM HUP USR1; do kill -$name $$; done; printf "%s|" "$@"'
    words = ["a b", "", "$HOME", "it's"]
    done = subprocess.run(shielded(["sh", "-c", script, "sh", *words]), capture_output=True, text=True, check=True)
    assert done.stdout == "a b||$HOME|it's|"
