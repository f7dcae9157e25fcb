"""`python -m recipes_lib`: the recipes from a terminal."""

from recipes_lib.cli.app import main

if __name__ == "__main__":
    main()
