"""Cards: what is claimed of a model's explanations, to be published, checked and listed on a page."""

from fgai.cards.bars import Finding, check_card
from fgai.cards.card import Card, Number, card
from fgai.cards.page import Listing, read_cards, write_page
from fgai.cards.sources import card_from_files

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
