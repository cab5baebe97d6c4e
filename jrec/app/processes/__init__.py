"""The processes of one run: how they meet, agree that they run the same, and notice that one is lost."""
