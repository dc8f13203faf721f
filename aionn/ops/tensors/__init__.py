"""Families that move, choose, sum or multiply the elements of tensors of any meaning."""
