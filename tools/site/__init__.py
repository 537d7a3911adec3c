"""The site: pages of the tree, a reference from the code, notebooks; ``make site`` builds it."""
