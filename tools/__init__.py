"""Small programs that look after this repository; no recipe needs them.

address    the repository's address, everywhere at once: make address REPO=owner/name
file_map   docs/file-map.md, written from the docstrings of the package: make texts
lab        copies of the notebooks for a reader to run and change: make lab
"""
