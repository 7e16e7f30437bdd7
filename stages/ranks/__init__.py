"""Rank vectors over a corpus: one more kind of teacher, and a second similarity at inference."""
