"""Reports for people: HTML pages with plots, and tables and sentences in a terminal, in one style and the same colours."""
