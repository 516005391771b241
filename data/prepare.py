"""The command zero-prepare in a checkout: python data/prepare.py <source> [options]"""

from zero.runtime.corpus.command import main

if __name__ == "__main__":
    main()
