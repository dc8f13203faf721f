"""The amount that users, and the processes of each, may take of something that all of them share.

Owns the rule. A user may take as long as it has no more than is left for all, and a process of it as long as it has no more than is
left for its user. So one user gets half at most, and one process a quarter; beside any number of them there is something left.

Not safe between threads: callers hold a lock of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

__all__ = ["Shares"]


class Shares:
    """Counts, and the rule.

    Args:
        amount_max: The amount for all.

    Attributes:
        amount_max: The same.
        taken: The amount that all have.
    """

    def __init__(self, amount_max: int) -> None:
        self.amount_max = amount_max
        self.taken = 0
        self._of_user: Counter[Hashable] = Counter()
        self._of_process: Counter[Hashable] = Counter()

    def had_by(self, user: Hashable, process: Hashable) -> tuple[int, int]:
        """The amounts that a user and a process have."""
        return self._of_user[user], self._of_process[process]

    def left_for(self, user: Hashable, process: Hashable) -> int:
        """The amount that a process of a user may take now."""
        user_has, process_has = self.had_by(user, process)
        left_for_user = (self.amount_max - self.taken - user_has) // 2
        return max(0, (left_for_user - process_has) // 2)

    def add(self, user: Hashable, process: Hashable, amount: int) -> None:
        """Counts what a process has taken, or with a negative amount given back."""
        self.taken += amount
        for table, key in ((self._of_user, user), (self._of_process, process)):
            table[key] += amount
            if not table[key]:
                del table[key]
