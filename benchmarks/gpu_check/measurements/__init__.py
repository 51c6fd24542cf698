"""Figures without bounds: seconds, memory, rates, and the spread that bounds elsewhere have to allow for."""
