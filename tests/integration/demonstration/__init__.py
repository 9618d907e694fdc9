"""The demo on a stage where what takes minutes is played by the tests."""
