"""Cards: the measured and certified numbers of one model, to be published, checked and listed on a page."""

from fgai.reports.cards.card import Card, Finding, Number, card, card_from_files, check_card
from fgai.reports.cards.page import Listing, read_cards, write_page

__all__ = [
    "Card",
    "Finding",
    "Listing",
    "Number",
    "card",
    "card_from_files",
    "check_card",
    "read_cards",
    "write_page",
]
