"""The benchmark: evalpool beside other ways to run the same programs, in one run, on one machine. `make bench`."""
