"""A small ledger: money in whole cents, so that nothing is lost to rounding."""

from dataclasses import dataclass, field


@dataclass
class Ledger:
    """Entries in the order in which they were made."""

    entries: list = field(default_factory=list)

    def add(self, text, cents):
        """Add an entry; `cents` may be negative."""
        if not isinstance(cents, int):
            raise ValueError(f"cents={cents!r}: money is counted in whole cents")
        self.entries.append((text, cents))

    def balance(self):
        """The sum of all entries, in cents."""
        return sum(cents for _, cents in self.entries)


def euros(cents):
    """Cents as text: 1234 becomes '12.34'."""
    sign = "-" if cents < 0 else ""
    return f"{sign}{abs(cents) // 100}.{abs(cents) % 100:02d}"


if __name__ == "__main__":
    ledger = Ledger()
    ledger.add("bread", -420)
    ledger.add("wages", 250_000)
    print(euros(ledger.balance()))
