"""The benchmark: compares evalpool with other ways to run the same programs, in one run on one machine. `make
bench`."""
