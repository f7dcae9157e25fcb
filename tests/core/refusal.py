"""What a function says when it refuses."""


def refusal(function, *args, **options):
    """The text of the ValueError, or None."""
    try:
        function(*args, **options)
    except ValueError as error:
        return str(error)
    return None
