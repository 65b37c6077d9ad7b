"""Models and trainers of other libraries. Each needs its own extra; none is imported by the rest of the library."""
