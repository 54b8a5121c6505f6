"""For all tests: Ctrl-C is not ignored, as it is in background jobs of a shell without job control: programs inherit it."""

import signal

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
