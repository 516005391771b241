"""What the pages of runs, plans and corpora share: their style, template engine and plotting library."""
