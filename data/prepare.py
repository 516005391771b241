"""The command zero-prepare in a checkout: python data/prepare.py <source> [options]"""

from zero.corpus.preparing.zero_prepare import main

if __name__ == "__main__":
    main()
