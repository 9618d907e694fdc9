"""A product with people in it: drives the demo and the tests over HTTP like any client.

Fed by the public API / feeds the public API. Nothing inside the service reads its hidden state.
"""
