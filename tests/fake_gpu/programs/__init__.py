"""Programs that tests run on the fake GPU; each prints one line of JSON at its end."""
