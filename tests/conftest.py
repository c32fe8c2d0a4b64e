"""What holds for every test."""

from hypothesis import settings

# No deadline: a busy machine is no failure. A failing example prints the blob that replays it.
settings.register_profile("bookmender", deadline=None, print_blob=True)
settings.load_profile("bookmender")
