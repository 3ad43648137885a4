"""cupyflash-bench: what this machine's attention costs, whether it is right, and what is missing for more."""
