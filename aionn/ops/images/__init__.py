"""Families that work on images: windows, regions, boxes, sizes."""
