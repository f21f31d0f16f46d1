"""Bounds of attention networks behind limits under injection; certificates and training use them."""
