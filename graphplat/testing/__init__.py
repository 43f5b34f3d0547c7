"""Ways to test platforms and runtimes: a simulated accelerator, a conformance suite, reference models."""
