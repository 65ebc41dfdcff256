"""What a run tells about itself: where its time went."""
