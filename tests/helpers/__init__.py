"""What the tests start, look at and share; the fixtures are in conftest.py."""
