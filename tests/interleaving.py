"""Threads that run one at a time; which of them goes on at each of its points is drawn, so that any order comes up."""

import random
import threading


class Interleaving:
    """Runs functions in threads, one at a time, from point to point.

    Args:
        seed: Of the order that is drawn.
    """

    def __init__(self, seed):
        self._chance = random.Random(seed)  # noqa: S311
        self._turns = {}
        self._is_back = threading.Semaphore(0)

    def add(self, function):
        """Add a function that is to run in a thread of its own."""
        is_ready = threading.Event()

        def live():
            turn = self._turns[threading.get_ident()] = threading.Semaphore(0)
            is_ready.set()
            turn.acquire()
            try:
                function()
            finally:
                del self._turns[threading.get_ident()]
                self._is_back.release()

        threading.Thread(target=live, daemon=True).start()
        is_ready.wait()

    def point(self):
        """Give way to another thread; without effect outside of those that were added."""
        turn = self._turns.get(threading.get_ident())
        if turn is not None:
            self._is_back.release()
            turn.acquire()

    def run(self, after_each):
        """Run all to their ends, and call a function whenever one has reached its next point."""
        while self._turns:
            self._chance.choice(list(self._turns.values())).release()
            self._is_back.acquire()
            after_each()
