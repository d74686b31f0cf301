"""Ctrl-C has its effect behind what must not be left half done, and only there."""

import signal
import threading

import pytest

from sayfa.base.interrupts import held_back


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_one_interrupt_waits_for_the_end_of_the_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), held_back():  # noqa: PT012
        press()
        done.append(1)
    assert done
    with pytest.raises(KeyboardInterrupt):
        press()


def test_a_second_one_does_not_wait_for_what_never_ends() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), held_back():  # noqa: PT012
        press()
        press()
        done.append(1)
    assert not done


def test_blocks_may_lie_in_each_other() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), held_back():  # noqa: PT012
        with held_back():
            press()
            done.append(1)
        done.append(2)
    assert done == [1, 2]


def test_an_error_of_the_block_is_not_hidden() -> None:
    with pytest.raises(KeyError), held_back():
        raise KeyError
    with pytest.raises(KeyboardInterrupt) as caught, held_back():  # noqa: PT012
        press()
        raise KeyError
    assert isinstance(caught.value.__context__, KeyError)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_where_nobody_waits_for_it_nothing_is_changed(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with held_back():
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_may_use_it() -> None:
    done = []

    def work() -> None:
        with held_back():
            done.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [signal.default_int_handler]
