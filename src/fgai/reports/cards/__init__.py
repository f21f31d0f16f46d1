"""Cards: the measured and certified numbers of one model, to be published, checked and listed on a page."""

from fgai.reports.cards.card import (
    Card,
    Finding,
    Listing,
    Number,
    card,
    card_from_files,
    check_card,
    read_cards,
    write_page,
)

__all__ = [
    "Card", "Finding", "Listing", "Number", "card", "card_from_files", "check_card", "read_cards",
    "write_page",
]  # fmt: skip
