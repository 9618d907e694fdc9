"""A control plane and two regions over narrow links, of real processes. Fed by / feeds `tests.bench.regions`."""
